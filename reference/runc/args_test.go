package runc

import (
	"strings"
	"testing"
)

func TestParseArgs(t *testing.T) {
	for line, want := range map[string]invocation{
		"":          {},
		"--version": {},
		"list":      {command: "list"},
		"--root /r --log /l --log-format json create --bundle /b --pid-file /p id": {
			command: "create", root: "/r", log: "/l", logFormat: "json", bundle: "/b"},
		"--root=/r --log=/l --debug --systemd-cgroup create --bundle=/b id": {command: "create", root: "/r", log: "/l", bundle: "/b"},
		"--rootless auto create -b /b id":                                   {command: "create", bundle: "/b"},
		"create --console-socket --bundle --bundle /b id":                   {command: "create", bundle: "/b"},
		"create --no-pivot --preserve-fds 3 id --bundle /b":                 {command: "create", bundle: "/b"},
		"-root /r run -bundle /b id":                                        {command: "run", root: "/r", bundle: "/b"},
		"exec --process /p id sh -c create":                                 {command: "exec"},
		"--root /r kill create 9":                                           {command: "kill", root: "/r"},
		"create --bundle":                                                   {command: "create"},
	} {
		if got := parseArgs(strings.Fields(line)); got != want {
			t.Errorf("%q: %+v", line, got)
		}
	}
}

func TestOnlyCommandsThatMountAreLookedAt(t *testing.T) {
	for command, want := range map[string]bool{
		"create": true, "run": true, "restore": true, "exec": false, "start": false, "delete": false, "state": false, "": false,
	} {
		if got := (invocation{command: command}).starts(); got != want {
			t.Errorf("%q: %v", command, got)
		}
	}
}
