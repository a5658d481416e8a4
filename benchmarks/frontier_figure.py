"""The frontier's record as a picture: see --help."""

from backsketch_bench.frontier_figure import main

if __name__ == "__main__":
    main()
