"""Callbacks for trainers, one module each; import the one you need, as each needs its own package."""
