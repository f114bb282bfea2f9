"""The ranks of a run: who they are, how they meet, and how they learn that one is gone. In the order of a run:

1. Who am I? `identity` reads rank, world size and rank 0's address from the flags, torchrun, srun or mpirun; where a
   command has to start the ranks itself, `launch` does, as its `workers`. `secret` finds what all of them must know,
   `network` this host's addresses, `limits` how many files and how much memory this process may take.
2. Where do we meet? `rendezvous` brings all ranks together: rank 0 listens at its `endpoint`, and the others find it.
3. How do we prove who we are? By the handshake of a new `connection`, on which every message is proved, too.
4. What does rank 0 serve? Its `server` sees who has come, and whether all want the same run. Then it serves the keys
   and values of a `store`. A `meeting` is the ranks that have met: they exchange values through the store.
5. How do we learn that one is gone? A `watchdog` in every rank keeps connections to its `neighbours`, and says so.
   It also finds a `deadlock`: ranks that wait for each other forever.
6. What does a rank compute with, and how does it end? `devices` chooses its GPU and threads; `exit` is its last words.
"""
