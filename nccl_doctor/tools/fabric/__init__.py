"""RDMA devices of a host: ports, GIDs, error counters, and the way from them to the GPUs."""
