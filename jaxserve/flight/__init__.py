"""The flight recorder: the scheduler's last decisions, and their replay."""
