"""watchdog ⇄ watchdog_peers → watchdog_report: operations past their timeout, and dead ranks."""
