"""Records that all rooms use: the launch, the observations, the findings. Pure data."""
