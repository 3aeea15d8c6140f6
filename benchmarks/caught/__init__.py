"""Ten kinds of public bugs of inference engines, planted one at a time, and the command that finds each."""
