"""What checks look with and reason with; `nccl_doctor.api` passes on what they may import.

Rooms by subject: `machine` (what this host is made of), `gpu` (the state of its GPUs), `net` (its
interfaces, names and ports),
`firewall` (its packet filter), `nccl` and `variables` (what NCCL is told and makes of it),
`meeting` (the road to MASTER_ADDR:MASTER_PORT), `peers` (calls between hosts), `timing` (timed
exchanges between them). Beside them stands what judges of any subject use. Of the engine they know
the records alone.
"""
