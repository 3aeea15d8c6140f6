"""How models/pocket-whisper is made: sentences, synthesised speech, training, export."""
