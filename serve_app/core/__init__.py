"""Pure decisions without side effects: standard library only; time and randomness are arguments."""
