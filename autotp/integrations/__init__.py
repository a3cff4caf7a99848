"""What other libraries need to train a parallel model, through their public doors. Nothing else imports this folder."""
