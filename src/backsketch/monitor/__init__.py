"""The noise of sketched layers, live: estimated while a model trains, without its inputs."""
