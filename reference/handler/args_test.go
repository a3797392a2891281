package handler

import (
	"slices"
	"strings"
	"testing"
)

func TestParseArgs(t *testing.T) {
	for line, want := range map[string]Invocation{
		"":          {},
		"--version": {},
		"list":      {Command: "list"},
		"--root /r --log /l --log-format json create --bundle /b --pid-file /p id": {
			Command: "create", Root: "/r", Log: "/l", LogFormat: "json", Bundle: "/b", Words: []string{"id"}},
		"--root=/r --log=/l --debug --systemd-cgroup create --bundle=/b id": {
			Command: "create", Root: "/r", Log: "/l", Bundle: "/b", Words: []string{"id"}},
		"--rootless auto create -b /b id":                   {Command: "create", Bundle: "/b", Words: []string{"id"}},
		"create --console-socket --bundle --bundle /b id":   {Command: "create", Bundle: "/b", Words: []string{"id"}},
		"create --no-pivot --preserve-fds 3 id --bundle /b": {Command: "create", Bundle: "/b", Words: []string{"id"}},
		"-root /r run -bundle /b id":                        {Command: "run", Root: "/r", Bundle: "/b", Words: []string{"id"}},
		"exec --process /p id sh -c create":                 {Command: "exec", Words: []string{"id", "sh", "-c", "create"}},
		"exec -d id sh --bundle /b":                         {Command: "exec", Words: []string{"id", "sh", "--bundle", "/b"}},
		"--root /r kill create 9":                           {Command: "kill", Root: "/r", Words: []string{"create", "9"}},
		"create --bundle":                                   {Command: "create"},
	} {
		got := ParseArgs(strings.Fields(line))
		if got.Command != want.Command || got.Root != want.Root || got.Log != want.Log || got.LogFormat != want.LogFormat ||
			got.Bundle != want.Bundle || !slices.Equal(got.Words, want.Words) {
			t.Errorf("%q: %+v", line, got)
		}
	}
	in := ParseArgs(strings.Fields("delete -f id --pid-file=/p"))
	if !in.Has("force", "f") || in.Has("all", "a") || in.Option("pid-file", "") != "/p" {
		t.Errorf("%+v", in)
	}
}
