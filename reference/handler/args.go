// Package handler is what the reference runtime handlers share: runc's command line and log,
// the configuration, the commands about volumes, and checks of devices.
package handler

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// Invocation is a command line of runc.
type Invocation struct {
	// Command is the sub-command, or "".
	Command string
	// Root is passed on with queries to runc. Log and LogFormat say where containerd reads the error of a failure.
	Root, Log, LogFormat string
	// Bundle is the container's bundle, as given.
	Bundle string
	// Options are the command's options by name; Words are the other arguments.
	Options map[string]string
	Words   []string
}

// The options of runc that take a value, before and after the command. All others are switches.
var (
	globalValues  = []string{"log", "log-format", "root", "criu", "rootless"}
	commandValues = []string{
		"bundle", "b", "console-socket", "pid-file", "preserve-fds", "pidfd-socket",
		"image-path", "work-path", "parent-path", "manage-cgroups-mode", "empty-ns", "lsm-profile", "lsm-mount-context",
		"process", "p",
	}
)

// ParseArgs reads runc's command line, without its first word.
func ParseArgs(args []string) Invocation {
	in := Invocation{Options: make(map[string]string)}
	global := make(map[string]string)
	rest := options(args, globalValues, global)
	in.Root, in.Log, in.LogFormat = global["root"], global["log"], global["log-format"]
	if len(rest) == 0 {
		return in
	}
	in.Command = rest[0]
	// runc takes options after the container's id, too, but those that follow the
	// container of an exec are of the process.
	for rest = rest[1:]; len(rest) > 0; {
		if rest = options(rest, commandValues, in.Options); len(rest) > 0 {
			in.Words, rest = append(in.Words, rest[0]), rest[1:]
		}
		if in.Command == "exec" && len(in.Words) > 0 {
			in.Words = append(in.Words, rest...)
			break
		}
	}
	in.Bundle = in.Option("bundle", "b")
	return in
}

// Option returns the value of an option with two names.
func (in Invocation) Option(long, short string) string {
	if value, given := in.Options[long]; given {
		return value
	}
	return in.Options[short]
}

// Has reports whether a switch was given.
func (in Invocation) Has(long, short string) bool {
	_, one := in.Options[long]
	_, other := in.Options[short]
	return one || other
}

// options reads options up to the first other word, and returns the rest.
func options(args, withValue []string, into map[string]string) []string {
	for len(args) > 0 {
		word := args[0]
		if word == "--" {
			return args[1:]
		}
		if len(word) < 2 || word[0] != '-' {
			return args
		}
		args = args[1:]
		name, value, given := strings.Cut(strings.TrimLeft(word, "-"), "=")
		if !given && slices.Contains(withValue, name) && len(args) > 0 {
			value, args = args[0], args[1:]
		}
		into[name] = value
	}
	return nil
}

// Reporter reports errors where runc's callers look for them: containerd reads the log file
// that it named on the command line, people read standard error.
type Reporter struct {
	// Name is the name of the program.
	Name   string
	In     Invocation
	Stderr io.Writer
}

// Fail reports why nothing was done.
func (t Reporter) Fail(err error) { t.write("error", err.Error()) }

// Warn reports a problem that does not keep the container from starting.
func (t Reporter) Warn(text string) { t.write("warning", text) }

func (t Reporter) write(level, text string) {
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
