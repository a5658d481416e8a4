"""The benchmarks: speed, compared with the alternatives, and bytes against noise on real activations."""
