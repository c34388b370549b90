"""Other serving systems beside ours on the same prompts, each in a virtual environment of its own."""
