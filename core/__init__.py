"""The loop of GRPO, what it is made of, and the commands; core/grpo.py comes first."""
