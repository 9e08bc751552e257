"""What checks look with and reason with; `nccl_doctor.api` passes on what they may import."""
