"""The measured tables of ModeSwitch-LLM (arXiv 2605.23057), and the paper's figures computed from them."""
