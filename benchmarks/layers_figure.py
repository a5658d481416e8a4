"""The noise of each layer as a picture: see --help."""

from backsketch_bench.layers_figure import main

if __name__ == "__main__":
    main()
