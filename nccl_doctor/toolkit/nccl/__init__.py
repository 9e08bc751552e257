"""NCCL's library, configuration, plug-ins, and its choice of interfaces."""
