package rig

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
)

// Build builds programs of this project, by their names in cmd, into a directory.
func Build(dir string, flags []string, names ...string) error {
	return build(dir, flags, nil, names)
}

// BuildRelease builds programs as a release has them.
func BuildRelease(dir string, names ...string) error {
	return build(dir, []string{"-trimpath", "-ldflags", "-s -w"}, []string{"CGO_ENABLED=0"}, names)
}

func build(dir string, flags, env, names []string) error {
	args := append([]string{"build", "-o", dir + "/"}, flags...)
	for _, name := range names {
		args = append(args, "github.com/crust-proxy/crust-proxy/cmd/"+name)
	}
	cmd := exec.Command("go", args...) //nolint:gosec // our own programs
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %v: %w\n%s", names, err, out)
	}
	return nil
}

// Get gets a page from a server on a Unix socket, on a connection of its own.
func Get(ctx context.Context, socket, path string) (string, error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://server"+path, http.NoBody)
	if err != nil {
		return "", err
	}
	reply, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = reply.Body.Close() }()
	body, err := io.ReadAll(reply.Body)
	if err != nil {
		return "", err
	}
	if reply.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", reply.Status, body)
	}
	return string(body), nil
}
