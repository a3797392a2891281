package ctl

import "github.com/crust-proxy/crust-proxy/internal/ctl/show"

// What comes from the daemon may quote a guest: it is escaped before a terminal
// gets it.

func escape(text string) string { return show.Escape(text) }

func escapeLines(text string) string { return show.EscapeLines(text) }

func escapeJSON(text []byte) []byte { return show.EscapeJSON(text) }
