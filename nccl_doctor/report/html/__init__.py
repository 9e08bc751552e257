"""The parts of the report as one HTML page: each makes one section from a report, and is pure."""
