"""From a budget of bytes to a config for every layer."""
