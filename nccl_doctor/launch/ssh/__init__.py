"""`run --hostfile`: one command on one host starts the run on every host, over ssh.

`hostfile` says which hosts, `exports` which variables they are given; `run` starts them through
`ssh`, where `relay` is the other end, and makes one report of what they answer; `faults` says why a
host could not be started on. Nothing is examined here, and nothing that examines knows of it.
"""
