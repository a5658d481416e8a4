"""The benchmarks: speed beside what users pick instead, and the frontier of bytes against noise on real activations."""
