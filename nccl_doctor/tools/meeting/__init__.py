"""Where the job meets: the road to MASTER_ADDR:MASTER_PORT, and who answers there."""
