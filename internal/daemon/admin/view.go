package admin

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// mostViews bounds the answers in preparation or on their way: each has up to a page of volumes.
const mostViews = 8

// mostFindings and mostRows bound an answer for a node with thousands of volumes.
const (
	mostFindings = 100
	mostRows     = 500
	viewTime     = 10 * time.Second
	// writeTime is how long a reader may take for an answer.
	writeTime = 5 * time.Second
	// sharedTime is how long an answer is given to others who ask the same.
	sharedTime = time.Second
)

// View serves what the Admin API shows of the node, as JSON and as a page, to whoever reaches the
// address. So it changes nothing, and leaves out what may be confidential: the configuration, and the
// mount options of volumes, which anybody who may create a StorageClass writes.
func (s *AdminServer) View() http.Handler {
	mux := http.NewServeMux()
	for path, answer := range map[string]func(*http.Request) (content string, body []byte, err error){
		"/v1/volumes": s.viewVolumes, "/{$}": s.page,
		"/v1/node": func(req *http.Request) (string, []byte, error) { return asJSON(s.nodeView(req.Context())) },
	} {
		last := &shared{turn: make(chan struct{}, 1), answer: answer}
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, req *http.Request) {
			ctx, cancel := context.WithTimeout(req.Context(), viewTime)
			defer cancel()
			content, body, err := last.get(req.WithContext(ctx))
			if err != nil {
				code := http.StatusServiceUnavailable
				if status.Code(rpccode.Status(err)) == codes.InvalidArgument {
					code = http.StatusBadRequest
				}
				http.Error(w, err.Error(), code)
				return
			}
			w.Header().Set("Content-Type", content)
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTime)) // a slow reader has a slot
			_, _ = w.Write(body)                                                          //nolint:gosec // JSON, or of a template that escapes
		})
	}
	slots := make(chan struct{}, mostViews)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		for name, value := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; style-src '" + styleHash + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
			"X-Content-Type-Options":  "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
		} {
			w.Header().Set(name, value)
		}
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
			mux.ServeHTTP(w, req)
		default:
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests at a time: try again", http.StatusTooManyRequests)
		}
	})
}

// shared prepares the answers of a path, one at a time. Who asks the same soon after gets the same: anybody may ask, as
// often as they like.
type shared struct {
	answer func(*http.Request) (content string, body []byte, err error)
	turn   chan struct{} // a lock for the rest

	query, content string
	body           []byte
	at             time.Time
}

func (s *shared) get(req *http.Request) (content string, body []byte, err error) {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-req.Context().Done():
		return "", nil, req.Context().Err()
	}
	if s.body != nil && s.query == req.URL.RawQuery && time.Since(s.at) < sharedTime {
		return s.content, s.body, nil
	}
	if content, body, err = s.answer(req); err == nil {
		s.query, s.content, s.body, s.at = req.URL.RawQuery, content, body, time.Now()
	}
	return content, body, err
}

func asJSON(m proto.Message) (string, []byte, error) {
	body, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
	return "application/json", body, err
}

func (s *AdminServer) nodeView(ctx context.Context) *adminv1.NodeView {
	view := &adminv1.NodeView{Node: s.describe(ctx, true)}
	view.Node.Config, view.Node.Errors = "", view.Node.Errors[:min(len(view.Node.Errors), mostFindings)]
	if all := view.GetNode().GetFindings(); len(all) > mostFindings {
		view.Node.Findings = all[:mostFindings]
		view.Node.Findings = append(view.Node.Findings, fmt.Sprintf("and %d more: see crustctl doctor on the node", len(all)-mostFindings))
	}
	view.Handlers, _ = s.ListHandlers(ctx, &adminv1.ListHandlersRequest{}) // these two never fail
	view.Drivers, _ = s.ListDrivers(ctx, &adminv1.ListDriversRequest{})
	return view
}

// viewVolumes answers with a page of volumes, by the fields of ListVolumesRequest in the query.
func (s *AdminServer) viewVolumes(req *http.Request) (string, []byte, error) {
	query := req.URL.Query()
	state, known := adminv1.VolumeState_value["VOLUME_STATE_"+strings.ToUpper(query.Get("state"))]
	if query.Get("state") != "" && !known {
		return "", nil, volume.Errorf(volume.Invalid, "there is no state %.40q", query.Get("state"))
	}
	got, err := s.ListVolumes(req.Context(), &adminv1.ListVolumesRequest{
		Driver: query.Get("driver"), Handler: query.Get("handler"), State: adminv1.VolumeState(state), PageToken: query.Get("page_token"),
	})
	if err != nil {
		return "", nil, err
	}
	for _, v := range got.GetVolumes() {
		v.MountFlags = nil
	}
	return asJSON(got)
}

//go:embed page.html
var pageText string

// page.html has one style, in one element.
var pageTemplate = template.Must(template.New("page").Funcs(template.FuncMap{"shown": shown, "used": used, "age": age}).Parse(pageText))

var styleHash = func() string {
	_, style, _ := strings.Cut(pageText, "<style>")
	style, _, _ = strings.Cut(style, "</style>")
	sum := sha256.Sum256([]byte(style))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}()

func (s *AdminServer) page(req *http.Request) (string, []byte, error) {
	volumes, total := s.worstVolumes()
	var out bytes.Buffer
	err := pageTemplate.Execute(&out, map[string]any{"View": s.nodeView(req.Context()), "Volumes": volumes, "Total": total, "Now": time.Now().UTC().Format(time.RFC3339)})
	return "text/html; charset=utf-8", out.Bytes(), err
}

// worstVolumes returns at most mostRows volumes, those with a problem first, and how many there are.
func (s *AdminServer) worstVolumes() (rows []*adminv1.Volume, total int) {
	var bad, good []deferral.Status
	all := s.Node.Shown()
	for _, status := range all {
		switch s.Node.state(status) {
		case adminv1.VolumeState_VOLUME_STATE_DEGRADED, adminv1.VolumeState_VOLUME_STATE_REFUSED, adminv1.VolumeState_VOLUME_STATE_HELD,
			adminv1.VolumeState_VOLUME_STATE_REMOVING:
			bad = append(bad, status)
		default:
			good = append(good, status)
		}
	}
	all = slices.Concat(bad, good)
	return sys.Map(all[:min(len(all), mostRows)], s.Node.message), len(all)
}

// shown bounds a text, and removes what could change how the text beside it reads.
func shown(text string) string {
	return sys.ClipTo(strings.Map(func(r rune) rune {
		if sys.IsPrintable(r) {
			return r
		}
		return ' '
	}, text), 1000)
}

func used(v *adminv1.Volume) string {
	for _, u := range v.GetUsage() {
		if u.GetUnit() == adminv1.VolumeUsage_UNIT_BYTES && u.GetTotal() > 0 {
			const gib = 1 << 30
			return fmt.Sprintf("%d%% of %s GiB", 100*u.GetUsed()/u.GetTotal(), strconv.FormatFloat(float64(u.GetTotal())/gib, 'f', 1, 64))
		}
	}
	return ""
}

func age(v *adminv1.Volume) string {
	if v.GetCreatedAt() == nil {
		return ""
	}
	return max(0, time.Since(v.GetCreatedAt().AsTime())).Truncate(time.Second).String()
}
