"""The noise of sketched layers, estimated while a model trains, without keeping their inputs."""
