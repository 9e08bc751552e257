"""Storage that a job needs: looked at by processes that a dead disk may keep, judged by hosts."""
