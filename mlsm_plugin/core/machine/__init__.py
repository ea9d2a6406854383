"""Memory and processors of this machine: what glibc keeps, and how threads wait."""
