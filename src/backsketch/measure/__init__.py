"""What measuring a training step needs: storages, running modules, who holds what, and leaving no trace."""
