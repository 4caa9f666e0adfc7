"""The ranks as processes: how they meet, agree, watch each other and stop."""
