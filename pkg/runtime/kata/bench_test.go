package kata

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func BenchmarkStats(b *testing.B) {
	node := newBench(b, kataemu.Go)
	keeping(b, node)
	v := published(b, node, "a")
	node.startShim(b, v, "sb1")
	b.Run("handler", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := node.h.Stats(b.Context(), v); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("dial-each-time", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := dialAndAsk(node.h.cfg.socketOf("sb1", goShim), v.Device.Path); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// dialAndAsk is what drivers do today, through Kata's own library.
func dialAndAsk(socket, device string) error {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", socket)
		},
	}
	client := http.Client{Transport: transport, Timeout: 5 * time.Second}
	response, err := client.Get("http://shim" + statsPath + escape(escape(device)))
	if err != nil {
		return err
	}
	body, err := io.ReadAll(response.Body)
	if err == nil {
		_, err = parseStatsJSON(body)
	}
	_ = response.Body.Close()
	return err
}

func BenchmarkPublishRetract(b *testing.B) {
	node := newBench(b, kataemu.Go)
	v := node.Volume("a")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := node.h.Publish(b.Context(), v); err != nil {
			b.Fatal(err)
		}
		if err := node.h.Retract(b.Context(), v); err != nil {
			b.Fatal(err)
		}
	}
}
