"""Draft heads that read the target's hidden states: EAGLE-3 and MTP, their layers and their files."""
