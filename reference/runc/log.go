package runc

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"
)

// teller says what happened where runc's callers look: containerd reads the log
// file that it names on the command line, people see the standard error.
type teller struct {
	in     invocation
	stderr io.Writer
}

func (t teller) fail(err error) { t.tell("error", err.Error()) }

// warn tells what does not keep the container from starting.
func (t teller) warn(text string) { t.tell("warning", text) }

func (t teller) tell(level, text string) {
	text = "crust-runc: " + text
	_, _ = fmt.Fprintln(t.stderr, text)
	if t.in.log == "" {
		return
	}
	file, err := os.OpenFile(t.in.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_SYNC, 0o644) //nolint:gosec // as runc itself opens it
	if err != nil {
		return // the standard error has it
	}
	defer func() { _ = file.Close() }()
	now := time.Now().Format(time.RFC3339)
	if t.in.logFormat != "json" {
		_, _ = fmt.Fprintf(file, "time=%q level=%s msg=%q\n", now, level, text)
		return
	}
	line, err := json.Marshal(map[string]string{"level": level, "msg": text, "time": now})
	if err == nil {
		_, _ = file.Write(append(line, '\n'))
	}
}
