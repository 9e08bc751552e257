"""Pseudonyms in place of names of hosts, addresses, users and paths.

What may be recorded at all is decided earlier, by `nccl_doctor.system.masking`: secrets never
get here. Here a record that people keep becomes one that they can give away. The same key gives
the same pseudonyms, so that two reports can still be compared and merged, and `Book` says what
each of them stands for. `cover` alone touches files: it keeps the private map.
"""

from nccl_doctor.report.redaction.book import Book, key_of_map
from nccl_doctor.report.redaction.reports import known_of, redact
from nccl_doctor.report.redaction.text import Text

__all__ = ["Book", "Text", "key_of_map", "known_of", "redact"]
