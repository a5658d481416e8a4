"""GLUE: its tasks, files and metrics, and fine-tuning on them by the paper's recipe."""
