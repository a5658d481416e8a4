"""Programs that use the library: the demo, fine-tuning on GLUE. Nothing in the library imports them."""
