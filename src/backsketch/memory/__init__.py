"""What a training step holds for backward, where it peaks, and what a conversion would change."""
