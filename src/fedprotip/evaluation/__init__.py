"""How good is the model? One pass gives all modes; metrics have one definition each."""
