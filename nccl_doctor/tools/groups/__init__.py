"""Process groups under a deadline: formed, exercised, and judged when one of them does not end."""
