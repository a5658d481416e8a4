"""What every setting keeps, the noise it adds and the time it takes, on real activations: see --help."""

from backsketch_bench.frontier import main

if __name__ == "__main__":
    main()
