package handler

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"
)

// Teller says what happened where runc's callers look: containerd reads the log
// file that it names on the command line, people see the standard error.
type Teller struct {
	// Name is the program's.
	Name   string
	In     Invocation
	Stderr io.Writer
}

// Fail tells why nothing was done.
func (t Teller) Fail(err error) { t.tell("error", err.Error()) }

// Warn tells what does not keep the container from starting.
func (t Teller) Warn(text string) { t.tell("warning", text) }

func (t Teller) tell(level, text string) {
	text = t.Name + ": " + text
	_, _ = fmt.Fprintln(t.Stderr, text)
	if t.In.Log == "" {
		return
	}
	file, err := os.OpenFile(t.In.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_SYNC, 0o644) //nolint:gosec // as runc itself opens it
	if err != nil {
		return // the standard error has it
	}
	defer func() { _ = file.Close() }()
	now := time.Now().Format(time.RFC3339)
	if t.In.LogFormat != "json" {
		_, _ = fmt.Fprintf(file, "time=%q level=%s msg=%q\n", now, level, text)
		return
	}
	line, err := json.Marshal(map[string]string{"level": level, "msg": text, "time": now})
	if err == nil {
		_, _ = file.Write(append(line, '\n'))
	}
}
