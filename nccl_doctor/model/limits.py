"""Largest numbers that are believed, wherever they come from: variables, options, messages, files.

What is larger is a mistake or an attack. Lists are made of these numbers, so they bound memory too.
"""

from __future__ import annotations

MAX_RANKS = 131_072
"""Ranks of a job, and so its hosts."""
MAX_LOCAL_RANKS = 4096
"""Ranks of one host."""
MAX_SEATS = 2 * MAX_RANKS + 64
"""Participants of a job: latecomers and doubles, too."""
MAX_PID = 1 << 31
MAX_SECONDS = 1_000_000.0
"""Length of a time limit, eleven days: `poll` and `alarm` take no more than some weeks."""
MOST_MORE_S = 480
"""Most seconds, whole ones, by which rank 0 may put off the end of a run without --timeout."""
