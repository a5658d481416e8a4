"""What a whole training step keeps, its peak and its time, beside exact training and checkpointing: see --help."""

from pathlib import Path

from backsketch.programs.page_keeping import restart_keeping_pages
from backsketch_bench.whole_step_command import main

if __name__ == "__main__":
    restart_keeping_pages()
    main(Path(__file__).parent / "reports")
