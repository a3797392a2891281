//go:build system

package daemon_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// TestPageInABrowser: a browser shows the page of a node with 10,000 volumes as its policy allows it, without a
// script and without a request for anything else; with http.view off there is none.
func TestPageInABrowser(t *testing.T) {
	rig.Need(t, "chromium")
	d := rig.NewDaemon(t)
	for i := range 10_000 {
		dir := kata.VolumeDir(d.Kata, d.Target(fmt.Sprintf("pod-%05d", i)))
		check.Must(t, os.Mkdir(dir, 0o700))
		check.Must(t, os.WriteFile(dir+"/mountInfo.json", fmt.Appendf(nil, `{"volume-type":"directvol","device":"/dev/<b>%d</b>","fstype":"ext4"}`, i), 0o600))
	}
	d.Start()
	var mutex sync.Mutex
	var asked []string
	server := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			mutex.Lock()
			asked = append(asked, r.In.URL.Path)
			mutex.Unlock()
			r.SetURL(&url.URL{Scheme: "http", Host: "daemon"})
		},
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", d.HTTPSocket)
		}},
	})
	defer server.Close()
	browse := func(what string) (shown, log string) {
		browser := exec.CommandContext(t.Context(), "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
			"--user-data-dir="+t.TempDir(), "--enable-logging=stderr", "--hide-scrollbars", what, server.URL+"/")
		var errs strings.Builder
		browser.Stderr = &errs
		out, err := browser.Output()
		check.Require(t, err == nil, "%v:\n%s", err, errs.String())
		return string(out), errs.String()
	}
	dom, log := browse("--dump-dom")
	rows := strings.Count(dom, "<td>ADOPTED</td>")
	check.That(t, rows == 500 && strings.Contains(dom, "500 of 10000; 10000 adopted") && !strings.Contains(dom, "<b>"), "%d rows in:\n%.3000s", rows, dom)
	for _, word := range []string{"CONSOLE", "Content Security Policy", "Refused"} {
		check.That(t, !strings.Contains(log, word), "the browser says %q:\n%s", word, log)
	}
	picture := filepath.Join(t.TempDir(), "page.png")
	browse("--screenshot=" + picture)
	info, err := os.Stat(picture)
	check.That(t, err == nil && info.Size() >= 10<<10, "no picture: %v", err)
	server.Close()
	for _, path := range asked {
		check.That(t, path == "/" || path == "/favicon.ico", "the browser asks for %s", path)
	}
	d.Kill()
	config := filepath.Join(t.TempDir(), "config.yaml")
	check.Must(t, os.WriteFile(config, []byte(strings.Replace(d.Config(), `http.sock"}`, `http.sock", view: false}`, 1)), 0o600))
	off := &rig.Process{Name: "off", Program: d.Program("crust-proxy"), Args: []string{"--config", config}, LogFile: filepath.Join(t.TempDir(), "log")}
	off.Ready = func() error { _, err := rig.Get(t.Context(), d.HTTPSocket, "/readyz"); return err }
	check.Must(t, off.Start())
	defer off.Kill()
	for _, path := range []string{"/", "/v1/node", "/v1/volumes"} {
		got, err := rig.Get(t.Context(), d.HTTPSocket, path)
		check.That(t, err != nil && strings.Contains(err.Error(), "404"), "with http.view off, %s is %.100q, %v", path, got, err)
	}
}
