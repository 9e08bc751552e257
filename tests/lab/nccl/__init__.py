"""Real NCCL on hosts with many interfaces, against the rules of nccl-doctor: see `rows`."""
