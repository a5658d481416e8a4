"""The frontier's record as tables for the documentation: see --help."""

from backsketch_bench.frontier_report import main

if __name__ == "__main__":
    main()
