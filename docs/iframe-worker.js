// Search of a page that was opened from a folder (file://), where browsers start no worker: its script runs in a hidden
// frame instead. The theme looks for the name `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.waiting = []
      this.frame.onload = () => this.ready()
      this.frame.srcdoc = `<script>postMessage = m => parent.postMessage(m, "*")</` + `script><script src="${url}"></` + `script>`
      addEventListener("message", event => {
        if (event.source === this.frame.contentWindow) this.heard(event.data)
      })
      document.body.append(this.frame)
    }
    ready() {
      const waiting = this.waiting
      this.waiting = undefined
      waiting.forEach(message => this.postMessage(message))
    }
    heard(data) {
      const event = new MessageEvent("message", {data})
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
    postMessage(message) {
      if (this.waiting) this.waiting.push(message)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data: message}))
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
