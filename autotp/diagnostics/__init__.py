"""What a user learns without a GPU and without processes: the plan as text, and the proof.

What may not enter: anything that a training step runs.
"""
