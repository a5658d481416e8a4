"""The demo: a small byte-level GPT trained on the sources of Python's standard library, exactly and in other ways."""
