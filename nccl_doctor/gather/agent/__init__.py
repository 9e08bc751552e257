"""One agent for each host: of thousands of ranks, rank 0 reads one batch of each host.

The first rank of a host starts a process, the agent (not that of torchrun). The ranks of the host
sign in with it, ask it for the messages of rank 0, and give it their answers; it signs in for all
of them, reads a message once for all of them, and posts their answers of a round as one batch. Each
rank keeps its own connection to the store: if the agent dies, is stopped or breaks off, the rank
goes on by itself from where it was, with the seat that it has. So an agent is never waited for in
vain, and nothing that it does is needed for a verdict.
"""
