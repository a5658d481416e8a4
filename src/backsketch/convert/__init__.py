"""Which layers are sketched: in place, by class, reversible; and what a conversion reaches."""
